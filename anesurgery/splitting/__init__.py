"""Models cut into chunks and joined again: `split`, and functions merged into one model or taken out of one.

`graph` reads the ops of a program with what they weigh and makes a program of some, `cuts` chooses where to
cut, `split` and `merge` are what users call.
"""
