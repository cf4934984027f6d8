"""Ask a Ray cluster's directory what it has, and print it as JSON; `ray_cluster.py` runs this in a process of its own.

{"nodes": the resources of each node, "versions": of ray and python there, "ours": here, "is_node": whether this machine
is a node, which a driver's machine has to be, "wants_token": whether the cluster does, "sends_token": whether we would}
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main(address: str) -> None:
    import ray
    from ray._common.usage.usage_lib import get_cluster_metadata

    directory, wants_token, sends_token = open_directory(address)
    alive = [node for node in directory.get_all_node_info(timeout=5).values() if node.state == 0]
    there = get_cluster_metadata(directory)  # type: ignore[no-untyped-call]
    here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    cluster = {
        "nodes": [dict(node.resources_total) for node in alive],
        "versions": {"ray": there.get("ray_version"), "python": there.get("python_version")},
        "ours": {"ray": ray.__version__, "python": ".".join(map(str, sys.version_info[:3]))},
        "is_node": any(node.node_manager_address in (here, "127.0.0.1") for node in alive),
        "wants_token": wants_token,
        "sends_token": sends_token,
    }
    print(json.dumps(cluster))


def open_directory(address: str) -> tuple[Any, bool, bool]:
    """(the directory, whether the cluster wants a token, whether a driver on this machine sends one).

    A driver sends a token where there is one. A cluster that was started without one cannot call such a driver back,
    and all its actors die without a reason.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    except ImportError:  # an older Ray, without tokens
        return GcsClient(address=address), False, False

    def send_token() -> bool:
        return maybe_enable_token_auth_if_token_available(warn_if_disabled=False)

    given = os.environ.get("RAY_AUTH_MODE", "").lower()
    try:
        directory: Any = GcsClient(address=address)
    except Exception as error:
        if type(error).__name__ != "AuthenticationError" or not send_token():
            raise
        return GcsClient(address=address), True, True
    return directory, given == "token", send_token()


if __name__ == "__main__":
    main(sys.argv[1])
