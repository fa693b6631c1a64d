"""The docstrings of public names have one template.

One line says what it is. Then come text, with a formula where one defines it, and the
sections of `ORDER`, of which those that apply are there. `docs/public.py` says what is
public.
"""

import inspect
import re

import pytest

from docs import public


ORDER = [
    "Args",
    "Attributes",
    "Returns",
    "Yields",
    "Raises",
    "Example",
    "References",
    "See Also",
]
HEADING = re.compile(rf"^({'|'.join(ORDER)}):$", re.M)
LISTED = public.listed()
FUNCTIONS = {name: value for name, value in LISTED.items() if inspect.isroutine(value)}
CLASSES = {
    name: value
    for name, value in LISTED.items()
    if inspect.isclass(value) and not issubclass(value, Exception)
}
MEMBERS = {
    f"{name}.{member}": value
    for name, kind in CLASSES.items()
    for member, value in public.members(kind).items()
}
# Functions return them; nobody calls the class.
RETURNED = {"sparsejax.rows.Lazy", "sparsejax.training.DataParallel"}
# Parameters that flax adds to its classes.
FLAX = {"graph", "name", "parent"}

# What implements a paper.
PAPERS = """
    pallas_kernels.HashMemory pallas_kernels.partition pallas_kernels.partition_dense
    pallas_kernels.threshold_hash
    sparsejax.ColumnTable sparsejax.MomentumCorrection sparsejax.chunked_sync
    sparsejax.dgc sparsejax.embrace.horizontal sparsejax.embrace_sync
    sparsejax.local_steps sparsejax.ok_topk_sync sparsejax.rounds.demo
    sparsejax.rounds.diloco sparsejax.rounds.flex_demo sparsejax.rounds.pulse_loco
    sparsejax.rounds.sparse_loco sparsejax.rounds.streaming_diloco
    sparsejax.schemes.BalancedParallelism sparsejax.schemes.GTopk
    sparsejax.schemes.HierarchicalCentralization sparsejax.schemes.OkTopk
    sparsejax.schemes.OmniReduce sparsejax.schemes.PowerSGD sparsejax.schemes.SparCML
    sparsejax.schemes.SparDL sparsejax.schemes.SparsePS sparsejax.schemes.Zen
    sparsejax.spardl_sync sparsejax.sparsifiers.DGC sparsejax.sparsifiers.Dragonn
    sparsejax.sparsifiers.GaussianK sparsejax.sparsifiers.MSTopK
    sparsejax.sparsifiers.QSGD sparsejax.sparsifiers.ReuseThreshold
    sparsejax.sparsifiers.Striding sparsejax.sparsifiers.Visible
    sparsejax.transforms.gaussian_k_sync sparsejax.transforms.gtopk_sync
    sparsejax.transforms.power_sgd_sync sparsejax.transforms.topk_a_sync
    sparsejax.transforms.topk_dsa_sync sparsejax.zen_sync
""".split()
# What a formula defines.
FORMULAS = """
    sparsejax.MomentumCorrection sparsejax.Network sparsejax.Residual
    sparsejax.accumulate sparsejax.advise.CompressionCost sparsejax.local_steps
    sparsejax.rounds.demo sparsejax.rounds.diloco sparsejax.rounds.flex_demo
    sparsejax.rounds.pulse_loco sparsejax.rounds.sparse_loco
    sparsejax.rounds.streaming_diloco sparsejax.rows.rowwise_adagrad
    sparsejax.schemes.PowerSGD sparsejax.sparsifiers.GaussianK sparsejax.sparsifiers.QSGD
    sparsejax.sparsifiers.Sign sparsejax.sparsifiers.Visible sparsejax.sparsifiers.Warmup
    sparsejax.sync sparsejax.transforms.clip_by_rank
""".split()
# Names that are easily confused. Each links to all others of its line.
CONFUSED = [
    "sparsejax.sync sparsejax.zen_sync sparsejax.dense_sync sparsejax.all_reduce",
    "sparsejax.local sparsejax.per_replica",
    "sparsejax.value_and_grad sparsejax.per_replica sparsejax.embrace.value_and_grad",
    "sparsejax.save sparsejax.restore sparsejax.resized sparsejax.abstract_state",
    "sparsejax.init sparsejax.bind sparsejax.abstract_state",
    "sparsejax.metrics sparsejax.summary sparsejax.residuals sparsejax.explain",
    "sparsejax.profile sparsejax.advise.profile_from_state sparsejax.make_plan",
    "sparsejax.doctor sparsejax.check_job sparsejax.check_replicas",
    "sparsejax.check_job sparsejax.advise.check_coordinator sparsejax.advise.watch_job",
    "sparsejax.dgc sparsejax.top_k sparsejax.sparsify",
    "sparsejax.warm_up sparsejax.sparsifiers.Warmup sparsejax.sparsifiers.Schedule",
    "sparsejax.accumulate sparsejax.local_steps",
    "sparsejax.skip_nonfinite sparsejax.transforms.check_numbers",
    "sparsejax.lookup sparsejax.column_lookup",
    "sparsejax.rows.settle sparsejax.embrace.flush",
    "sparsejax.RowGrads sparsejax.SparseTensor",
    "sparsejax.Residual sparsejax.MomentumCorrection",
    "sparsejax.chunked_sync sparsejax.rounds.sparse_loco sparsejax.rounds.demo",
    "sparsejax.rounds.diloco sparsejax.rounds.streaming_diloco",
    "sparsejax.rounds.demo sparsejax.rounds.flex_demo",
    "sparsejax.sparsifiers.TopK sparsejax.sparsifiers.MSTopK sparsejax.schemes.GTopk",
    "sparsejax.schemes.Zen sparsejax.schemes.BalancedParallelism"
    " sparsejax.schemes.HierarchicalCentralization",
    "pallas_kernels.compact pallas_kernels.threshold_hash",
    "pallas_kernels.partition pallas_kernels.partition_dense",
    "pallas_kernels.pack_message pallas_kernels.unpack_message"
    " pallas_kernels.index_message",
]
CONFUSED += [
    f"sparsejax.local_steps sparsejax.rounds.{preset}"
    for preset in ("diloco", "streaming_diloco", "sparse_loco", "pulse_loco")
]


def sections(doc: str) -> dict[str, str]:
    """The text before the first heading, as "", and that below each heading."""
    first, *rest = HEADING.split(doc)
    return {"": first} | dict(zip(rest[::2], rest[1::2], strict=True))


def entries(text: str) -> list[str]:
    """The names that a section defines."""
    return re.findall(r"^    (\*{0,2}\w+): \S", text, re.M)


def parameters(value) -> list[str]:
    """The parameters of a call, as a docstring writes them."""
    if inspect.isclass(value) and value.__init__ is not object.__init__:
        value = value.__init__
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        stars.get(parameter.kind, "") + name
        for name, parameter in inspect.signature(value).parameters.items()
        if name not in ("self", "cls")
    ]


def faults(name, value):
    """What of the template a docstring lacks."""
    doc = inspect.getdoc(value) or ""
    found = sections(doc)
    summary, _, text = found[""].partition("\n\n")
    if not re.fullmatch(r".*\w.*\.", summary.strip()):
        yield f"the summary is one line that ends in a period: {summary!r}"
    if [*found][1:] != [heading for heading in ORDER if heading in found]:
        yield f"sections have the order {ORDER}"
    if ">>> " not in found.get("Example", ""):
        yield "it has an Example:"
    is_of_paper = re.search(r"\b(paper|authors)\b", doc) or name in PAPERS
    if is_of_paper and "References" not in found:
        yield "it names the paper below References:"
    if name in FORMULAS and not re.search(r"\n\n    \S", "\n\n" + text):
        yield "it has its formula, in an indented block"
    if returns := found.get("Returns", "").strip():
        first = re.sub("`[^`]*`", "", returns.partition("\n")[0])
        if ": " in first or first.endswith(":"):
            yield "Sphinx takes what precedes a colon in Returns: for a type"
    if inspect.isroutine(value):
        yield from faults_of_function(value, found)
    elif name in CLASSES and name not in RETURNED:
        is_of_flax = name.startswith(("sparsejax.embrace.linen", "sparsejax.embrace.nnx"))
        wanted = [p for p in parameters(value) if not (is_of_flax and p in FLAX)]
        given = entries(found.get("Args", found.get("Attributes", "")))
        if given != wanted:
            yield f"Attributes: or Args: name {wanted}, and not {given}"


def faults_of_function(value, found):
    """What the sections of a function lack."""
    given, wanted = entries(found.get("Args", "")), parameters(value)
    if given != wanted:
        yield f"Args: names {wanted}, and not {given}"
    returned = inspect.signature(value).return_annotation
    if returned not in (None, inspect.Parameter.empty):
        if not {"Returns", "Yields"} & {*found}:
            yield f"it has Returns: for {returned}"


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_docstring_has_the_template(name):
    assert not [*faults(name, LISTED[name])]


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_a_method_is_documented(name):
    value = MEMBERS[name]
    doc = inspect.getdoc(value) or ""
    found = sections(doc)
    summary = found[""].partition("\n\n")[0].strip()
    assert re.fullmatch(r".*\w.*\.", summary), f"{summary!r} is no line with a period"
    assert [*found][1:] == [heading for heading in ORDER if heading in found]
    if inspect.isroutine(function := getattr(value, "__func__", value)):
        wanted, given = parameters(function), entries(found.get("Args", ""))
        assert given == wanted if given else len(wanted) < 3, f"Args: names {wanted}"


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_method_that_is_inherited_is_in_the_reference(name):
    listed = [base for base in CLASSES[name].__mro__ if base in CLASSES.values()]
    for base in CLASSES[name].__mro__:
        if base.__module__.startswith(public.OURS):
            for member in vars(base):
                if public.is_member(base, member):
                    assert any(public.is_member(kind, member) for kind in listed), (
                        f"{base.__module__}.{base.__name__} has {member}: "
                        "list it on a page of docs/api"
                    )


@pytest.mark.parametrize("line", CONFUSED)
def test_names_that_are_easily_confused_link_to_one_another(line):
    names = line.split()
    for name in names:
        links = sections(inspect.getdoc(LISTED[name]) or "").get("See Also", "")
        missing = [other for other in names if other != name and f"`{other}`" not in links]
        assert not missing, f"{name} needs See Also: with {missing}"


def test_the_names_of_these_lists_are_listed():
    named = {*PAPERS, *FORMULAS, *RETURNED, *" ".join(CONFUSED).split()}
    assert named <= {*LISTED}
