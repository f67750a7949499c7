"""`TrainStep` and what one optimizer step needs: ZeRO stages, loss scale, norm, update."""
