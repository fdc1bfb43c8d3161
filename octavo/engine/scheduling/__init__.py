"""Who is computed in each step, and what becomes of the results.

Start at `scheduler.py`, the only file that the core calls. Then, in the order of a step:

1. `request_queues.py`: the unfinished requests, waiting, running or swapped out.
2. `step_planner.py`: one step, from the running requests to the waiting ones.
3. `policy.py`, `admission.py`, `batching.py`: who goes first, who may start, how many at once.
4. `placement.py`: KV blocks and worker rows for a request that starts, leaves or is preempted.
5. `step_builder.py`, `multi_step.py`: the plan as it is composed, and how many decode steps it has.
6. `steps_in_flight.py`: planning a step before the one before has come back.
7. `result_intake.py`: results, ends, and the outputs of both.

`build.py` puts them together from the options. The requests themselves are in `engine/requests/`,
the blocks in `engine/kv/`.
"""
