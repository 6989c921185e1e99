"""Training of DFlash and DFlow drafters, in torch: behind the extra `train`, imported by nothing else here.

`data` (sequences and batches), `model` (the drafter), `target` (the frozen target), `rollout` (drafting rounds),
`recipe` (the training loops), `simulate` (tokens a round), `generate` (the target's own answers), `texts` (the
worksheets of the example pair). The command `dflow-trt train` is `plan` (what is asked, and what is refused), `job`
(from prompts to a drafter) on `cache` (answers on disk), `loop` (resumable steps), `card` (the folder that comes out),
`files` (atomic writes) and `progress` (the bar).
"""
