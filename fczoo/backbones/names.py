"""Names of backbones: the bundled one, plug-ins', timm's plain ViTs, and spellings of hubs."""

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.names import match
from fczoo.core.registry import Registry

BUNDLED_NAME = "vit_nano_32"
BACKBONES: Registry[Any] = Registry("backbone", "register_backbone")
"""Backbones of plug-ins."""
SUFFIXES = (".safetensors", ".npz", ".pth", ".bin", ".pt", ".ckpt", ".tar")
UNSUPPORTED = (
    "fczoo takes plain vision transformers: no convolutional networks (ResNet, ConvNeXt), no "
    "hierarchical transformers (Swin, Hiera, MViT), and no ViTs with other kinds of blocks or "
    "position embeddings (BEiT 1 and 2, AIMv2, Perception Encoder, parallel blocks, distilled DeiT)"
)
"""What is not supported, in one sentence for lists and errors."""

EXAMPLES = (
    "take one such as vit_base_patch16_224, vit_base_patch14_dinov2, vit_base_patch16_siglip_224"
)
MIN_SIMILARITY = 0.75  # likeness of a misspelt name, from 0 to 1
MIN_PART_LETTERS = 3  # letters of a part of a name that is enough to suggest names

register_backbone = BACKBONES.register

_MODULES = ("vision_transformer", "deit", "eva")  # of timm, with plain vision transformers
_UNSUPPORTED_MODELS = re.compile(
    r"aimv2|_18x2|_xp_|_rpn_|radio|intern300m|sapiens2|vit_pe_|_rope_(?!reg)|_d?pwee|_dwee|_dlittle"
    r"|distilled|enormous|test_vit"
)
"""Models of these modules that are not plain vision transformers."""
_TABLE_PATTERN = re.compile(
    r"^default_cfgs = (?:generate_default_cfgs\()?(\{$.*?^\})\)?$", re.MULTILINE | re.DOTALL
)
_WEIGHT_KEYS = {"url", "file", "hf_hub_id"}  # keys that give the location of published weights

_DINOV2 = "vit_{}_patch14_dinov2.lvd142m", "vit_{}_patch14_reg4_dinov2.lvd142m"
_HUB_PATTERNS = (  # model of the Hugging Face hub -> timm's name of the same weights
    (r"facebook/dinov2-(small|base|large|giant)", _DINOV2[0]),
    (r"facebook/dinov2-with-registers-(small|base|large|giant)", _DINOV2[1]),
    (r"facebook/dinov3-vit([sbl])16-pretrain-lvd1689m", "vit_{}_patch16_dinov3.lvd1689m"),
    (r"facebook/dinov3-vit([sh])16plus-pretrain-lvd1689m", "vit_{}_plus_patch16_dinov3.lvd1689m"),
    (r"facebook/dinov3-vit7b16-pretrain-lvd1689m", "vit_7b_patch16_dinov3.lvd1689m"),
    (r"facebook/dino-vit([sb])(8|16)", "vit_{}_patch{}_224.dino"),
    (r"facebook/vit-mae-(base|large)", "vit_{}_patch16_224.mae"),
    (r"facebook/deit-(tiny|small|base)-patch16-224", "deit_{}_patch16_224.fb_in1k"),
    (r"google/vit-(base|large)-patch(16|32)-224-in21k", "vit_{}_patch{}_224.orig_in21k"),
    (r"google/vit-(huge)-patch(14)-224-in21k", "vit_{}_patch{}_224.orig_in21k"),
    (r"google/vit-(base)-patch16-(224|384)", "vit_{}_patch16_{}.orig_in21k_ft_in1k"),
    (r"google/siglip-(base|large|so400m)-patch(16|14)-(\d+)", "vit_{}_patch{}_siglip_{}.webli"),
    (r"google/siglip2-so400m-patch14-384", "vit_so400m_patch14_siglip_378.v2_webli"),
    (
        r"google/siglip2-(base|large|so400m|giantopt)-patch(16|32|14)-(\d+)",
        "vit_{}_patch{}_siglip_{}.v2_webli",
    ),
    (r"openai/clip-vit-(base)-patch(16|32)", "vit_{}_patch{}_clip_quickgelu_224.openai"),
    (r"openai/clip-vit-(large)-patch(14)", "vit_{}_patch{}_clip_quickgelu_224.openai"),
    (r"openai/clip-vit-(large)-patch14-(336)", "vit_{}_patch14_clip_quickgelu_{}.openai"),
    (
        r"laion/CLIP-ViT-(B|L|H)-(16|32|14)-laion2B-s3[24]B-b\d\dK",
        "vit_{}_patch{}_clip_224.laion2b",
    ),
    (r"laion/CLIP-ViT-(g)-14-laion2B-s12B-b42K", "vit_{}_patch14_clip_224.laion2b"),
    (r"laion/CLIP-ViT-(B|L)-(16|14)-DataComp.XL-s13B-b90K", "vit_{}_patch{}_clip_224.datacompxl"),
)
_LETTERS = {"s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant"}
_TIMM_WORDS = {**_LETTERS, "siglip2": "v2_webli"}  # word of a hub's model -> part of timm's name
_FAMILIES = re.compile(
    r"beit3|clip|deit3|deit|dinov2|dinov3|dino|eva02|eva|flexivit|ijepa|mae|metaclip|miil|siglip2?"
)
"""Words of a hub's model that name a family of listed backbones."""
_OTHER_FAMILIES = re.compile(r"aimv2|beit(?!3)|convnext|distilled|hiera|mvit|resnet|swin")


def backbone_names() -> list[str]:
    """Return the names of the bundled backbone, of plug-ins, and of timm's published plain ViTs."""
    return [BUNDLED_NAME, *BACKBONES.names(), *_names_of_timm()]


def registered_backbone(name: str) -> Any:
    """Return the class that a plug-in registers for a backbone; None for any other backbone.

    Args:
        name: Name in any spelling.

    Raises:
        FczooError: The plug-in cannot be imported, or has a name of fczoo's or timm's.
    """
    key = BACKBONES.find(name)
    if key is None:
        return None
    if match(key, (BUNDLED_NAME, *_names_of_timm(), *_architectures(_names_of_timm()))):
        problem = f"backbone {key!r} in {BACKBONES.get(key).__module__} has the name of a backbone"
        raise FczooError(f"{problem} of fczoo or timm; rename it")
    return BACKBONES.get(key)


@cache
def full_name(name: str) -> str:
    """Return a timm name with the tag of its default weights.

    Args:
        name: Name of a timm model; a name with a tag and an unknown name do not change.
    """
    if "." in name:
        return name
    candidates = (
        n for n in _names_from_source() if n.startswith(f"{name}.") and not n.endswith(".untrained")
    )
    return next(candidates, name)


def canonical_backbone(spec: str) -> str:
    """Return a backbone in the spelling of its listed name, with or without ``:FILE``.

    Args:
        spec: Name, file, or both; an unknown name and a file do not change.

    Raises:
        FczooError: The name is that of a model on a hub that is not one of timm's.
    """
    spec = _name_of_hub_model(spec)
    name, colon, file = spec.partition(":")
    if name in ("", BUNDLED_NAME):
        return spec
    name = BACKBONES.find(name) or name
    return f"{match(name, spellings()) or name}{colon}{file}"


@cache
def spellings() -> tuple[str, ...]:
    """Return the names of backbones, with and without the tag of their weights."""
    names = backbone_names()
    return (*names, *_architectures(names))


def unknown_name_error(name: str) -> FczooError:
    """Return the error for an unknown backbone name; it suggests only names that load.

    Args:
        name: Name of a model, here or on a hub.
    """
    architecture = name.rpartition("/")[2].partition(".")[0].replace("-", "_")
    known_names = _architectures(backbone_names())
    similar_names = difflib.get_close_matches(architecture, known_names, 3, MIN_SIMILARITY)
    similar_names = similar_names or names_containing(architecture)
    if "/" in name:
        is_other = _OTHER_FAMILIES.search(name.lower())
        similar_names = [] if is_other else _names_like_hub_model(name) or similar_names
    advice = (
        f"did you mean {', '.join(similar_names)}?"
        if similar_names
        else f"{UNSUPPORTED}; {EXAMPLES}"
    )
    return FczooError(f"no backbone is called {name!r}; {advice} (see 'fczoo list backbones')")


def _names_like_hub_model(name: str) -> list[str]:
    """Return three names of the family of a hub's model, those with most of its words first."""
    words = re.split(r"[^a-z0-9.]+", name.partition("/")[2].lower())
    family = next((part[0] for word in words if (part := _FAMILIES.match(word))), None)
    if not family:
        return []
    words = [_TIMM_WORDS.get(word, word) for word in words]
    family = "siglip" if family == "siglip2" else family
    names = [backbone for backbone in backbone_names() if family in backbone]
    common_words = {name: sum(part in name for part in words) for name in names}
    return sorted(names, key=lambda n: (-common_words[n], "base" not in n, len(n), n))[:3]


def names_containing(part: str) -> list[str]:
    """Return the three shortest names of backbones with a part such as ``dinov2``.

    Args:
        part: Part of a name; one with fewer than ``MIN_PART_LETTERS`` letters gives no names.
    """
    spelling = part.lower().replace("-", "_")
    return sorted((n for n in spellings() if spelling in n), key=len)[
        : 3 if len(spelling) >= MIN_PART_LETTERS else 0
    ]


def _name_of_hub_model(spec: str) -> str:
    """Return timm's name of a model that is written as on a hub; any other spelling unchanged.

    Such spellings are ``timm/NAME``, ``hf-hub:ORG/NAME``, and ``ORG/NAME`` of a known model.

    Raises:
        FczooError: The model of the hub is not known to be one of timm's.
    """
    name = re.sub(r"^(hf[-_]hub:|https://huggingface\.co/)", "", spec)
    if name.startswith("timm/") and not Path(spec).exists():
        return name.removeprefix("timm/").replace("timm/", "")
    for pattern, timm_name in _HUB_PATTERNS:
        if hub_match := re.fullmatch(pattern, name, re.IGNORECASE):
            words = [_LETTERS.get(word.lower(), word.lower()) for word in hub_match.groups()]
            if (model := timm_name.format(*words)) in _names_of_timm():
                return model
    is_model = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith(SUFFIXES)
    if name != spec or (is_model and not Path(spec).exists()):
        error = unknown_name_error(name)
        advice = "fczoo downloads only timm models; download other weights and give NAME:FILE"
        raise FczooError(f"{error}; {advice}")
    return spec


def _architectures(names: Iterable[str]) -> list[str]:
    """Return names without the tag of their weights, each once."""
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


@cache
def _names_of_timm() -> tuple[str, ...]:
    names = _names_from_source() or _names_from_timm()
    return tuple(sorted(name for name in names if not _UNSUPPORTED_MODELS.search(name)))


@cache
def _names_from_source() -> tuple[str, ...]:
    """Return the names in the tables of timm's modules, without an import of timm.

    The tuple is empty if a module does not contain such a table.
    """
    timm = importlib.util.find_spec("timm")
    assert timm and timm.origin, "timm is installed with fczoo"
    names: list[str] = []
    for module in _MODULES:
        table = _TABLE_PATTERN.search(
            (Path(timm.origin).parent / "models" / f"{module}.py").read_text("utf-8")
        )
        if not table:
            return ()
        names += _names_in_table(table[1])
    return tuple(names)


def _names_in_table(table: str) -> Iterator[str]:
    """Yield the names with published weights, and those that timm derives for QuickGELU."""
    node = ast.parse(table, mode="eval").body
    assert isinstance(node, ast.Dict), "the expression begins with a brace"
    quick_gelu = []
    for key, value in zip(node.keys, node.values, strict=True):
        match key, value:
            case ast.Constant(value=str(name)), ast.Call(keywords=arguments):
                keywords = {keyword.arg: keyword.value for keyword in arguments}
                places = [keywords[key] for key in _WEIGHT_KEYS & keywords.keys()]
                if all(ast.unparse(place) == "''" for place in places):
                    continue
                yield name
                if "notes" in keywords and "quickgelu" in ast.unparse(keywords["notes"]):
                    quick_gelu.append(name.replace("_clip_", "_clip_quickgelu_"))
    yield from quick_gelu


def _names_from_timm() -> list[str]:
    import timm

    names: list[str] = []
    for module in _MODULES:
        names += timm.list_models(module=module, pretrained=True, include_tags=True)
    return names
