"""Starts the service on this machine: `python -m examples.vllm_service --help`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import ray
from ray import serve

from .replica import Replica
from .router import Router

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="vllm_service",
        description="Replicas of vLLM whose requests may have plans. Options that are not listed "
        "are vLLM's: --model DIR --enforce-eager",
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="of each replica")
    parser.add_argument("--cpus", type=float, default=1, help="of each replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options, of_vllm = parser.parse_known_args(arguments)

    ray.init()  # RAY_ADDRESS names a cluster
    serve.start(http_options={"host": options.host, "port": options.port})
    # A deployment each, so that the router can choose between them.
    replica = serve.deployment(
        health_check_period_s=1,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
    )(Replica)
    replicas = {
        name: replica.options(name=name).bind(of_vllm)
        for name in (f"vllm-{number}" for number in range(options.replicas))
    }
    router = serve.deployment(max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})(
        Router
    )
    serve.run(router.bind(replicas), name="vllm", blocking=True)


if __name__ == "__main__":
    main()
