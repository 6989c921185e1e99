"""Training of DFlash and DFlow drafters, in torch: behind the extra `train`, imported by nothing else here.

`data` (sequences and batches), `model` (the drafter), `target` (the frozen target), `rollout` (drafting rounds),
`recipe` (the training loops), `simulate` (tokens a round), `generate` (the target's own answers), `texts` (the
worksheets of the example pair).
"""
