"""Evaluate a sharded model with EleutherAI's lm-evaluation-harness: `python -m longspan.lm_eval run ...`.

The harness runs on the first rank: it makes the tasks, computes the metrics and prints. Its requests to the model, in
tokens, are broadcast to all ranks.

- `scorer`: log-likelihoods and generation of token lists on every rank; needs no harness.
- `model`: the harness's model class, registered as "longspan".
- `__main__`: the harness's command line on as many ranks as `--model_args` name.
"""
