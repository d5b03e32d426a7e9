"""Make the model's next call reuse what a look at all samples has computed.

Begin with the essay in `tape`; `engine` recognises the call, `shallow` runs the part up to the cut, `replay` answers
operations from the tape, `rehearsal` and `axis` prove that this is right, `sandbox` and `footprint` leave no trace.
Knows no selector: it imports `batches` and nothing above.
"""
