"""Records the all-gathers of zeroamp's groups. `benchmarks.peers.counting` counts all collectives, below FSDP2."""

from zeroamp.hooks.collectives.all_gather import GroupAllGather


class Gathers:
    """`log`: the all-gathers of zeroamp's groups in the order of their calls, as (group, ranks that gather).

    What else happens may be put between them.
    """

    def __init__(self):
        self.log = []

    def __enter__(self):
        self._original = original = GroupAllGather.__call__

        def call(comm, output_tensor, input_tensor, group, async_op=False):
            self.log.append((comm.group_name, group.size()))
            return original(comm, output_tensor, input_tensor, group, async_op)

        GroupAllGather.__call__ = call
        return self

    def __exit__(self, *_):
        GroupAllGather.__call__ = self._original
