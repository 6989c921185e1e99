"""How each kind of drafter drafts: one file a kind, ``Drafting`` in each (:mod:`dflow_trt.kinds` lists them)."""
