"""`latest` leads to the newest checkpoint whatever bit of it is damaged; to another one only if somebody says so."""

import re

import pytest

from zeroamp import latest_checkpoint
from zeroamp.checkpoint.folder import open_draft
from zeroamp.checkpoint.manifest import Manifest


def _publish(folder, step):
    def manifest(serial):
        return Manifest(
            step=step, serial=serial, parent=0, run="run", world_size=1, mesh=(1,), config={}, versions={}, files={}
        )

    return open_draft(folder, step).publish(manifest, None)


def _flipped(content, bit):
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


@pytest.mark.parametrize("steps", [(1, 2, 3), (4, 5, 5), range(10, 21)])
def test_a_pointer_of_which_a_bit_is_flipped_or_an_end_is_cut_off_does_not_lead_back(tmp_path, steps):
    newest = [_publish(tmp_path, step) for step in steps][-1]
    pointer = tmp_path / "latest"
    content = pointer.read_bytes()
    damages = [content[:length] for length in range(len(content))]
    damages += [_flipped(content, bit) for bit in range(8 * len(content))]
    found = set()
    for damage in damages:
        pointer.write_bytes(damage)
        found.add(latest_checkpoint(tmp_path))
    assert found == {newest}


def test_a_name_alone_leads_back_and_one_with_another_serial_is_ignored_aloud(tmp_path, caplog):
    one, two = (_publish(tmp_path, step) for step in (1, 2))
    (tmp_path / "latest").write_text(f"{one.name}\n")
    assert latest_checkpoint(tmp_path) == one
    assert not caplog.records
    for text in (f"2 {one.name} 0", f"2 {one.name}", "step_1"):
        (tmp_path / "latest").write_text(f"{text}\n")
        assert latest_checkpoint(tmp_path) == two
        (message,) = caplog.messages
        assert re.search(f"{tmp_path / 'latest'} is ignored.*{text}", message)
        caplog.clear()


def test_a_checkpoint_that_comes_last_because_its_manifest_is_damaged_is_logged(tmp_path, caplog):
    one, two = (_publish(tmp_path, step) for step in (1, 2))
    (two / "zeroamp.json").unlink()
    assert latest_checkpoint(tmp_path) == one
    (message,) = caplog.messages
    assert re.search(f"{two}/zeroamp.json is damaged", message)
