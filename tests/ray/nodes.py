"""A cluster of Ray with several nodes on this machine, which come and go."""

import time

import running  # before Ray reads the environment
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

STORE_BYTES = 80 * 2**20


class Nodes:
    """The nodes of a cluster; a context manager that ends them all.

    head: what the head node has, such as num_cpus; a driver on this machine is connected to it.
    others: the nodes beside it that are there, the oldest first.
    """

    def __init__(self, **head):
        self._arguments, self.others = head, []

    def __enter__(self):
        self._cluster = Cluster(initialize_head=True, head_node_args=_arguments(self._arguments))
        self.head, self.address = self._cluster.head_node, self._cluster.address
        return self

    def __exit__(self, *_):
        self._cluster.shutdown()

    @property
    def on(self):
        return "--on", f"ray:{self.address}"

    def add(self, **what):
        node = self._cluster.add_node(**_arguments(what))
        self.others.append(node)
        return node

    def lose(self, node, kind="raylet"):
        for each in node.all_processes[kind]:
            running.kill(each.process.pid)
            each.process.wait()
        if node in self.others:
            self.others.remove(node)

    def give_notice(self, node, seconds=60):
        """Have the cluster know that a node will be gone in a while."""
        until = int((time.time() + seconds) * 1000)
        client = GcsClient(address=self.address)
        is_accepted, why_not = client.drain_node(
            node.node_id, DRAIN_NODE_REASON_PREEMPTION, "it is wanted elsewhere", until
        )
        assert is_accepted, why_not


def _arguments(what):
    return {"object_store_memory": STORE_BYTES, "include_dashboard": False, **what}
