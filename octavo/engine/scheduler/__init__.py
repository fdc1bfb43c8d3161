"""Schedules each step and updates requests by its result.

Start at `scheduler.py`: `Scheduler.schedule` and `Scheduler.update` contain the algorithm. The
other files:

1. `request_queues.py`: the unfinished requests (waiting, running or swapped out), and their order.
2. `step_builder.py`, `step_time.py`: a step's budget of tokens and of time, and how many decode
   steps a plan has.
3. `admission_control.py`, `batching.py`: which requests start.
4. `preemption.py`: which request loses its KV blocks, and how.
5. `kv_allocator.py`: KV blocks and worker rows of a request that starts, ends or is preempted.
6. `in_flight_steps.py`: whether a step may be scheduled while the one before is computed.
7. `request_resources.py`: grammars, adapters and media.

`build.py` puts them together from the options. The requests themselves are in `engine/requests/`,
the blocks in `engine/kv/`.
"""
