"""The numerical check at the end of a build: engines against the numpy reference, section by section.

``layer`` runs the embedding, the first and last block and the head of target and drafters, and every context and relay,
each cut out of its engine: memory stays near that of one section. Blocks run twice, at the first positions and far out
behind a full cache, so that windows and slow rotations show. ``full`` runs whole engines too.

Every kind of drafter has a module here, which :mod:`dflow_trt.kinds` names:

check(checks, draft)                  sections cut out of its engines, compared with the reference
check_whole(checks, prompt, draft)    its whole engines, behind a prompt that the target has read
"""

from dflow_trt.selfcheck.agreement import quantised_agreement
from dflow_trt.selfcheck.full import target_pass
from dflow_trt.selfcheck.run import run_self_check

__all__ = ["quantised_agreement", "run_self_check", "target_pass"]
