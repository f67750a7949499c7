"""Tables as text and as Markdown."""

from zeroamp.ledger.tables import render


def test_keys_are_the_header_with_spaces_but_names_stay_as_they_are():
    row = {"total_ms": 1234, "bytes_per_rank": 2, "a_run per day": 3}
    assert render([row], "github", names=["a_run per day"]).splitlines()[0].split("|")[1:-1] == [
        "   total ms ",
        "   bytes per rank ",
        "   a_run per day ",
    ]
    assert render([row], names=["a_run per day"]).splitlines()[0].split() == [
        "total",
        "ms",
        "bytes",
        "a_run",
        "per",
        "day",
    ]
