"""Training of drafters, in torch: behind the extra `train`, imported by nothing else here.

`data` (sequences and batches), `target` (the frozen target), `generate` (its own answers), `texts` (the worksheets of
the example pair), `recipe` (the training loops), `simulate` (tokens a round). A kind each, as `trainee` says:
`block` (DFlash, DFlow, Domino) on `model` (the drafter), `domino` (its causal head) and `rollout` (drafting rounds),
`eagle3`, and `draft_model`. The command `dflow-trt train` is `options` (what is asked), `shapes` and `plan` (what is
refused), `job` (from prompts to a drafter) on `compute` (where it runs), `cache` (answers on disk), `loop` (resumable
steps), `card` (the folder that comes out) and `progress` (the bar).
"""
