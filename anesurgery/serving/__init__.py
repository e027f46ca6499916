"""A page on this machine: drop a model, see its report, choose target and recipe, compare, download.

Starlette answers and uvicorn listens: two small packages, whose pages load nothing from elsewhere. Each piece
of work is a process of its own with limits on time, memory and sizes (`task.py`), one at a time (`jobs.py`);
what a visitor brings stays in a folder of its own and is deleted when the visitor leaves.
"""
