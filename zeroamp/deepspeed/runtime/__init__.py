"""`deepspeed.runtime`: the few names below it that scripts import."""
