"""Evaluation by EleutherAI's lm-evaluation-harness, the model sharded over ranks: `python -m longspan.lm_eval run ...`.

The harness runs on the first rank alone: it makes the tasks, counts and prints. What it asks of the model, in tokens,
goes to all ranks, which answer together.

    scorer.py   what every rank does: log-likelihoods and generation of token lists; needs no harness
    ranks.py    the first rank's calls, made on every rank
    model.py    the harness's model class, registered as "longspan"
    command.py  the harness's own command line, on as many ranks as the model asks for
"""
