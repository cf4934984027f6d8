"""Ask a Ray cluster's directory what it has, and print it as JSON; `ray_cluster.py` runs this in a process of its own.

{"nodes": the resources of each node, "versions": of ray and python there, "ours": here, "is_node": whether this machine
is a node, which a driver's machine has to be}
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any


def main(address: str) -> None:
    import ray
    from ray._common.usage.usage_lib import get_cluster_metadata
    from ray._raylet import GcsClient

    with contextlib.suppress(ImportError):  # older versions have no tokens
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    directory: Any = GcsClient(address=address)
    alive = [node for node in directory.get_all_node_info(timeout=5).values() if node.state == 0]
    there = get_cluster_metadata(directory)  # type: ignore[no-untyped-call]
    here = ray.util.get_node_ip_address()
    cluster = {
        "nodes": [dict(node.resources_total) for node in alive],
        "versions": {"ray": there.get("ray_version"), "python": there.get("python_version")},
        "ours": {"ray": ray.__version__, "python": ".".join(map(str, sys.version_info[:3]))},
        "is_node": any(node.node_manager_address in (here, "127.0.0.1") for node in alive),
    }
    print(json.dumps(cluster))


if __name__ == "__main__":
    main(sys.argv[1])
