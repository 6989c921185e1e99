"""The OpenAI-compatible endpoint: HTTP and SSE in front of Triton's ``dflow`` model.

In the order of the data: ``protocol`` (what a request may say), ``translate`` (a request as a job for the model),
``backend`` (the job over gRPC, updates back), ``answers`` (updates as OpenAI's objects), ``app`` (routes).
"""
