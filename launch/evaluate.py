"""Score the networks of a pretraining checkpoint on the held-out set, next to their baselines.

    python launch/evaluate.py --run runs/base --data shards/b --sequences 500

Runs in one process in fp32 and reads checkpoints of any ZeRO stage and world size. Masks and
samples are fixed, so scores of different checkpoints can be compared. Scores of discriminators from
different runs cannot, because a better generator makes the task harder. To compare those, use
--generator MODEL: it scores each one on sequences in which the generator of MODEL has replaced
tokens.
"""

import json

from deberta_ds.base.command_line import accept_old, parser_for, positive
from deberta_ds.base.errors import UserError, exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--run", required=True, help="run or checkpoint directory")
    parser.add_argument("--data", nargs="+", action="extend",
                        help="packed corpora, scored together and one by one (default: "
                             "data.heldout)")
    parser.add_argument("--tokenizer", help="tokenizer (default: that of the run)")
    parser.add_argument("--sequences", type=positive,
                        help="number of sequences, at least 1 (default: as in the run)")
    accept_old(parser, "--rows", "--sequences")
    parser.add_argument("--generator", metavar="MODEL",
                        help="score the discriminator on the replacements of this run or model")
    options = parser.parse_args()

    import torch

    from deberta_ds.checkpoint import find, saved_state
    from deberta_ds.cluster.launcher import count_gpus
    from deberta_ds.objectives.build import build_model, objective_of
    from deberta_ds.release.reader import check_same, read_tokenizer
    from deberta_ds.tokenizer import Tokenizer
    from deberta_ds.training.held_out import evaluate, score_discriminator
    from deberta_ds.training.inputs import held_out_sequences

    device = torch.device("cuda" if count_gpus() else "cpu")
    # Of a run in training there may be a newer checkpoint a moment later.
    place, (state, run), own = find.read_newest(options.run, lambda place: (
        place, saved_state.load_whole_state(place), read_tokenizer(place)))
    corpora = {path: path for path in options.data or ()} or run.data.heldout_corpora
    if not corpora:
        raise UserError(f"{options.run}: the run has no data.heldout; name a packed corpus "
                        "with --data")
    stored = {} if options.generator else run.data.heldout_replacements
    if run.objective.kind == "rtd_cached" and not options.generator and not stored.keys() >= \
            corpora.keys():
        raise UserError(f"{options.run}: --data has no stored replacements, which this run is to "
                        "find; name a --generator to make them, or leave --data out")
    tokenizer = own  # with the checkpoint, wherever it is moved
    if options.tokenizer or own is None:
        tokenizer = Tokenizer(options.tokenizer or run.data.tokenizer)
        if own is not None:
            check_same(tokenizer, own, options.run)
    rows = held_out_sequences(run, tokenizer, corpora, stored,
                              options.sequences or run.train.eval_sequences)
    if options.generator:
        scores = score_discriminator(place, options.generator, rows)
    else:
        model = build_model(run, tokenizer.size)
        model.load_state_dict(state)
        scores = evaluate(model.to(device), objective_of(run), device, rows,
                          run.train.micro_batch_size, run.evaluate.metrics)
    print(json.dumps(scores, indent=1))


if __name__ == "__main__":
    exit_cleanly(main)
