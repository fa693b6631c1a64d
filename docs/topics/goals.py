"""Which of the goals that records have were missed."""

from recorded import Results, table


def missed():
    """The section: how many goals there are, and a table of those that were missed."""
    goals = [*_of_compiling(), *_of_first_steps(), *_of_jit()]
    over = [goal for goal in goals if goal[1] > goal[2]]
    rows = [
        [what, f"{found:.2f}{unit}", f"{goal:.2f}{unit}", f"`{file}`"]
        for what, found, goal, unit, file in over
    ]
    head = ["what", "measured", "goal, at most", "file"]
    text = f"""Of {len(goals)} goals that records hold, {len(over)} were missed.
Goals that no record holds are with their figures on the pages of `benchmarks/`, including
those that were missed."""
    return "Goals that were missed", text, table(head, rows, 1)


def _of_compiling():
    for name in ("core-jax0.10.2", "core-jax0.12.0.1"):
        results = Results(name)
        for row in results.where(part="compile"):
            if row["to_reach"]:
                what = f"compiling {row['what']}, of 40 leaves densely"
                yield what, row["ratio"], row["to_reach"], "", results.name


def _of_first_steps():
    for name in ("first_step-jax0.10.2", "first_step-jax0.12.0.1"):
        results = Results(name)
        for row in results.rows:
            if row["to_reach"]:
                what = f"compiling a first step, {row['model']}, {row['sum']}"
                yield what, row["median"], row["to_reach"], " s", results.name


def _of_jit():
    results = Results("in-jit-jax0.10.2")
    for row in results.rows:
        if row["to_reach"]:
            for part, goal in zip(("step", "compile"), row["to_reach"], strict=True):
                what = f"{row['model']}, {row['side']}, {part}, of `shard_map`"
                yield what, row[f"{part}_ratio"], goal, "", results.name
