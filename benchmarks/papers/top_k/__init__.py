"""The comparisons of Ok-Topk, SparDL and gTopk: bytes, messages, time and training."""
