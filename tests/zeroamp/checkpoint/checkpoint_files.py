"""Checkpoints as files: manifests made and changed, with digests that fit."""

import hashlib
import json

from zeroamp.checkpoint.manifest import FileRecord, Manifest
from zeroamp.weights.files import MANIFEST

RECORD = FileRecord(num_bytes=1, sha256="0" * 64)
FILES = {"train.pt": RECORD, ".metadata": RECORD, "rank_00000.pt": RECORD}


def manifest(**fields):
    defaults = {
        "step": 1,
        "run": "a",
        "world_size": 1,
        "mesh": (1,),
        "config": {},
        "versions": {},
    }
    return Manifest(**{**defaults, "files": FILES, "tensors": {}, **fields})


def rewrite_manifest(checkpoint, change):
    """Change the manifest's content and let its digest fit again, as somebody who means harm would."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    change(content)
    content.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps({**content, "sha256": digest}))
