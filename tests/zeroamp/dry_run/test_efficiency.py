"""The efficiencies that `plan` uses, and the origin that it prints for them."""

import zeroamp
from tests.zeroamp.dry_run.plans import plan
from zeroamp.dry_run import efficiency
from zeroamp.dry_run.efficiency import efficiency_of

MEASURED = zeroamp.Efficiency(compute=0.5, memory=0.9, network=0.7, origin="measured: records/that")


def _note(run):
    return " ".join(str(run).split()).split("Times assume ")[1]


def test_without_a_measurement_the_plan_says_that_it_assumes():
    run = plan(stages=(3,))
    assert _note(run).startswith("70% of peak FLOP/s, 80% of memory bandwidth and 80% of the links, and ")
    assert "Parts of the peaks: round assumptions, not measurements." in _note(run)
    assert run.to_dict()["efficiency"]["origin"] == "round assumptions, not measurements"


def test_a_measurement_is_used_and_named(monkeypatch):
    monkeypatch.setattr(efficiency, "MEASURED", {"h100": MEASURED})
    assert efficiency_of(zeroamp.GPUS["h100"]) == MEASURED
    assert efficiency_of(zeroamp.GPUS["h200"]) == efficiency.ASSUMED
    measured = plan(stages=(3,), gpu="h100")
    assert measured.efficiency == MEASURED
    assert _note(measured).startswith("50% of peak FLOP/s, 90% of memory bandwidth and 70% of the links")
    assert "Parts of the peaks: measured: records/that." in _note(measured)


def test_what_the_caller_gives_counts_before_a_measurement(monkeypatch):
    monkeypatch.setattr(efficiency, "MEASURED", {"h100": MEASURED})
    run = plan(stages=(3,), gpu="h100", efficiency=zeroamp.Efficiency(compute=0.4))
    assert _note(run).startswith("40% of peak FLOP/s, 80% of memory bandwidth and 80% of the links, and ")
    assert "Parts of the peaks: as given." in _note(run)


def test_measurements_are_of_known_accelerators_and_name_their_record():
    for name, measured in efficiency.MEASURED.items():
        assert name in zeroamp.GPUS
        assert "benchmarks/records/" in measured.origin
