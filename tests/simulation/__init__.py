"""Router, scheduler and shards in one process, with time, network and faults that follow from one seed.

Real: `Scheduler`, `StepLoop`, `Recovery`, `RestartBudget`, `HealthMonitor`, `Port` and the workers' `SchedulerClient`,
on real asyncio tasks. Simulated: the event loop's clock (`event_loop.py`), the sockets, the shards (`shard.py`,
`shards.py`), the processes of the HTTP workers and their clients (`workers.py`, `clients.py`).

    python -m tests.simulation --seeds 1000
    python -m tests.simulation --seed 7 --trace
"""
