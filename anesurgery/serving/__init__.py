"""A web page on this machine: drop a model, see its report, choose target and recipe, compare, download.

Starlette answers and uvicorn listens: two small packages, whose pages load nothing from elsewhere. `web` holds
the visitors' models and answers the browser; `task` does one piece of work, in a process of its own with limits
on time, memory and sizes, one at a time. What a visitor sends stays in a folder of its own, and is deleted
after the visit.
"""
