"""Plans each step and updates requests by its result.

Start at `scheduler.py`: `Scheduler.schedule` and `Scheduler.update` contain the algorithm. The
other files have one subject each:

1. `request_queues.py`: the unfinished requests, waiting, running or swapped out.
2. `step_builder.py`, `step_time.py`, `multi_step.py`: a step's budget of tokens and of time, and
   how many decode steps a plan has.
3. `admission_control.py`: which requests start, by `policy.py`, `batching.py`, `admission.py`.
4. `preemption.py`, `preemption_policy.py`: which request loses its KV blocks, and how.
5. `kv_allocator.py`: KV blocks and worker rows of a request that starts, leaves or is preempted.
6. `in_flight_steps.py`: whether a step may be planned while the one before is computed.

`build.py` puts them together from the options. The requests themselves are in `engine/requests/`,
the blocks in `engine/kv/`.
"""
