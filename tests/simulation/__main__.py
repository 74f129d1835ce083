"""Runs seeds and prints steps a minute; a failing seed prints how to replay it."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import sys
import time

from tests.simulation.world import Report, SimulationFailed, simulate


def run_seed(seed: int) -> Report | str:
    """Of a seed that fails, what it says."""
    try:
        return simulate(seed)
    except SimulationFailed as failure:
        return str(failure)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="Run this seed alone.")
    parser.add_argument("--trace", action="store_true", help="Print every fault and error of the seed.")
    parser.add_argument("--seeds", type=int, default=1000, help="Number of seeds to run.")
    parser.add_argument("--first", type=int, default=0, help="The first of them.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="Processes that run seeds.")
    options = parser.parse_args()
    if options.seed is not None:
        print(simulate(options.seed, print if options.trace else None))
        return 0
    return run_seeds(range(options.first, options.first + options.seeds), options.jobs)


def run_seeds(seeds: range, jobs: int) -> int:
    gc.freeze()  # what is imported is no garbage
    started = time.monotonic()
    reports, failures = [], 0
    with multiprocessing.Pool(jobs) as pool:
        for result in pool.imap_unordered(run_seed, seeds, chunksize=4):
            if isinstance(result, Report):
                reports.append(result)
            else:
                failures += 1
                print(result, file=sys.stderr, flush=True)
        pool.close()
        pool.join()
    minutes = (time.monotonic() - started) / 60
    cpu_minutes = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) / 60
    steps, events = sum(each.num_steps for each in reports), sum(each.num_events for each in reports)
    print(
        f"{len(seeds)} seeds, {failures} failed: {sum(each.num_requests for each in reports):,} requests,"
        f" {steps:,} steps, {events:,} events, {sum(each.num_restarts for each in reports):,} restarts of the shards,"
        f" {sum(each.num_preemptions for each in reports):,} preemptions,"
        f" {sum(each.num_drafts for each in reports):,} drafts that were right,"
        f" {sum(each.num_copied_back for each in reports):,} blocks copied back,"
        f" in {minutes * 60:.0f} s with {jobs} processes:"
        f" {steps / minutes:,.0f} steps a minute, {steps / cpu_minutes:,.0f} in a minute of one core"
    )
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
