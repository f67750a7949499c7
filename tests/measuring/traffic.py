"""Planned and counted traffic in a form that compares."""


def traffic_rows(traffic):
    """Return {(collective, dtype, group): (calls, bytes)} as text and numbers."""
    assert traffic.calls.keys() == traffic.num_bytes.keys()
    return {tuple(map(str, key)): (calls, traffic.num_bytes[key]) for key, calls in traffic.calls.items()}
