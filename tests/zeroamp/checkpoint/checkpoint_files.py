"""Checkpoints as files: manifests made and changed, with digests that fit."""

import hashlib
import json

from zeroamp.checkpoint.manifest import Manifest
from zeroamp.weights.files import MANIFEST


def manifest(**fields):
    defaults = {
        "step": 1,
        "run": "a",
        "world_size": 1,
        "mesh": (1,),
        "config": {},
        "versions": {},
    }
    return Manifest(**{**defaults, "files": {}, **fields})


def rewrite_manifest(checkpoint, change):
    """Change the manifest's content and let its digest fit again, as somebody who means harm would."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    change(content)
    content.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps({**content, "sha256": digest}))
