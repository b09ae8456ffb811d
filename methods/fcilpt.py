"""FCILPT: Federated Class-Incremental Learning with Prompting. Liu et al., arXiv 2310.08948.

Follows the paper's Algorithm 1. In a round the client calls ``loss`` (prompt choice, L_QP, L_CE,
usage counts), then the server calls ``aggregate`` (sort and average). The authors have not released
code; what the paper leaves open is an option.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.aggregators.averaging import sort_by_usage
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import option
from fczoo.core.payload import Payload, whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, Evidence, Finding, ServerAggregator, Task
from fczoo.functional.cosine import cosines
from fczoo.functional.heads import head_logits
from fczoo.functional.prompts import PromptPool, choice_shares, gather_prompts, top_positions
from fczoo.protocols.registry import use_protocol_options


@register_method("fcilpt")
@use_protocol_options("fcilpt", "fcilpt")
@dataclass(frozen=True)
class FCILPT(PromptPool):
    """Clients train a pool of input prompts; the server sorts each pool by use before averaging.

    An image uses the prompts whose keys are nearest to its frozen feature. Clients train the pool
    with its keys, a prompt that is always used, and the linear head. They send these tensors and
    the number of times each prompt was chosen, by which the server sorts. (In the paper clients
    sort before the upload, with the same result, and do not send the counts.) Nothing is frozen at
    the end of a task.
    """

    paper = 'Liu et al., "Federated Class-Incremental Learning with Prompting", arXiv 2310.08948'
    formulas = r"""
    $$L = -\log \operatorname{softmax}_{c \in C_t}\bigl( h(f(x; P_{K(x)}, P_0)) \bigr)_y
    + \frac{1}{\lambda} \sum_{i \in K(x)} \bigl( 1 - \cos(q, k_i) \bigr)$$

    $K(x)$ are the $N$ prompts whose keys $k_i$ are nearest to the frozen feature $q$, $P_0$ is the
    prompt that is always used. The server sorts each client's pool by how often its prompts were
    chosen, then averages slot by slot.
    """
    dataset_options = {"digits": {"lr": 3e-2}}

    chosen: int = option(
        5, "number N of prompts chosen per image (0: only the common prompt, an ablation)", low=0
    )
    specific: int = option(
        0,
        "number T of task-specific prompts: an image takes the nearest of them and the N - 1 "
        "nearest of the M - T task-similar ones (eqs. 1 to 3); 0: one undivided pool",
        low=0,
    )
    common_length: int = option(
        5, "number L_c of tokens of the common prompt, which is always used", low=0
    )
    lr: float = option(
        2e-3,
        "learning rate (the paper's 0.03 is L2P's nominal rate, which L2P multiplies by batch "
        "size / 256)",
        low=0,
        tune=(1e-4, 1e-1, "log"),
    )
    strength: float = option(
        10.0,
        "lambda, weight of the cross-entropy relative to the key loss; the total loss is divided "
        "by lambda",
        low=1e-6,
    )
    init: Literal["symmetric", "small"] = option(
        "symmetric",
        "initialisation of prompts and keys: symmetric, U(-1, 1); small, U(0, 0.01) as in the "
        "JAX code of L2P",
    )
    sort: bool = option(
        True, "sort each client's pool by use before averaging (False: FedAvg of an L2P pool)"
    )
    head: Literal["averaged", "fixed"] = option(
        "averaged",
        "head: averaged, by the server over the clients; fixed, at its initial values, as "
        "Algorithm 1 exchanges no head (use head_init=means)",
    )
    query: Literal["cls", "embed_cls"] = option(
        "cls",
        "query of the prompt choice: cls, frozen class feature; embed_cls, embedded class token "
        "(paper), the same for all images",
    )
    pooled: Literal["prompt", "cls"] = option(
        "prompt",
        "input of the head: prompt, mean of the prompts' outputs as in L2P; cls, output of the "
        "class token",
        tune=["prompt", "cls"],
    )
    support: Literal["task", "local", "seen", "all"] = option(
        "task",
        "classes in the training softmax: task, the task's as in L2P (but all classes seen, for an "
        "image of an earlier task); local, those that the client holds; seen, all seen; all, all "
        "of the run",
    )
    old_clients: Literal["idle", "previous_task"] = option(
        "idle",
        "clients without new images: idle, they skip the task; previous_task, they train again on "
        "images of their last task, as in the code of GLFC, the paper that introduced such clients",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        similar = self.size - self.specific
        if self.specific and not 0 < self.chosen <= similar + 1:
            raise FczooError(
                f"{self.name}.specific is {self.specific}, so {similar} of the {self.size} prompts "
                f"are task-similar and {self.name}.chosen must be 1 to {similar + 1}; raise "
                f"{self.name}.size (the paper's values for CIFAR-100 leave no task-similar prompt)"
            )

    def training(self) -> Training:
        # Client: Adam on keys k, prompts P, the common prompt P^c and the head. Server, Alg. 1:
        # plain mean over the clients of a round, not weighted by n_k.
        idle = self.old_clients == "idle"
        optims = self.optims(self.optim(self.lr), "pool.", "common")
        if self.head == "fixed":
            del optims["head."]
        training = Training(
            optims=optims,
            inputs=["images", "query"],
            uploads={"usage": whole_tensors("counts", of_images=True)},
            averaging="uniform",
            averages_trained=not self.sort,
            data_scope="task" if idle else "latest",
            table_note="" if idle else "clients without new images train again on their last ones",
        )
        return self.with_head_means(training)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: the same pool continues; nothing is frozen or reset.
        if state:
            return state
        backbone.check_pool(self.pooled)
        if self.query != "cls":
            backbone.class_token()  # raises an error without a class token
        # Start of the run: M prompts [L_p, D] with keys [D], and P^c [L_c, D]. The paper does not
        # state their distribution.
        low, high = (-1.0, 1.0) if self.init == "symmetric" else (0.0, 0.01)
        pool = self.start_pool(backbone, low, high, rng)
        common = torch.empty(self.common_length, backbone.token_dim)
        common.uniform_(low, high, generator=rng)
        return {**pool, "common": common, **self.start_head(task, backbone.dim, rng)}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Prompt choice: for each image the N keys with the smallest distance 1 - cos(q, k_i).
        similarity, chosen = self.choose(backbone, train, batch)
        # L_CE: cross-entropy under the chosen prompts. The paper does not state the classes of the
        # softmax, so ``support`` sets them.
        first = (
            ctx.task.start
            if self.support in ("task", "local") and self.old_clients == "idle"
            else 0
        )
        last = ctx.task.classes if self.support == "all" else ctx.task.stop
        features = self._features(backbone, train, batch, chosen)
        logits = head_logits({**ctx.shared, **train}, features)[:, first:last]
        if self.support == "local":
            logits = torch.where(
                batch.class_count[first:last] > 0, logits, torch.finfo(logits.dtype).min
            )
        elif self.support == "task" and first < ctx.task.start:
            old = batch.y < ctx.task.start
            new = torch.arange(first, last, device=batch.y.device) >= ctx.task.start
            logits = torch.where(old[:, None] | new, logits, torch.finfo(logits.dtype).min)
        entropy = batch.mean(F.cross_entropy(logits, batch.y - first, reduction="none"))
        # L_QP: sum of 1 - cos(q, k_i) over the chosen keys. Other keys get no gradient.
        key_loss = batch.mean((1 - similarity).sum(-1))
        # freq_i: number of times prompt i was chosen in this round's local training.
        usage = (F.one_hot(chosen, self.size).to(batch.w) * batch.w[:, None, None]).sum((0, 1))
        # L = L_QP + lambda L_CE, divided by lambda.
        return entropy + key_loss / self.strength, {"usage": usage}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        # Algorithm 1, sort: each client's pool by freq, descending, with one permutation for keys
        # and prompts; ties keep their order. Average: keys and prompts slot by slot, P^c, the head.
        # In the paper clients sort before they upload; the result is the same.
        return (
            sort_by_usage(payloads, average, self.specific)
            if self.sort
            else average([p.drop("usage") for p in payloads])
        )

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: choose N prompts by the global keys, run the prompted forward pass, take the
        # argmax over the classes seen.
        _, chosen = self.choose(backbone, state, batch)
        return head_logits(state, self._features(backbone, state, batch, chosen))[:, : task.stop]

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return self._features(backbone, tree, batch, self.choose(backbone, tree, batch)[1])

    def diagnose(self, evidence: Evidence) -> Mapping[str, Finding]:
        backbone, state = evidence.backbone, evidence.state
        return choice_shares(
            evidence, lambda batch: self.choose(backbone, state, batch)[1], self.size
        )

    def choose(self, backbone: Backbone, tree: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        """Choose the prompts of each image: the N keys nearest to its query, nearest first.

        With ``specific`` > 0: the nearest task-specific key, then the N - 1 nearest task-similar
        ones.

        Args:
            backbone: The frozen backbone.
            tree: Tree with ``pool.key`` [M, D].
            batch: Images with their queries [B, D].

        Returns:
            Cosines cos(q, k_i) [B, N] and numbers i [B, N] of the chosen prompts.
        """
        # Query q. As printed it is the class token after the embedding layer, the same for every
        # image. The default is the frozen feature without prompts, as in L2P.
        query = (
            batch.query if self.query == "cls" else backbone.class_token().expand_as(batch.query)
        )
        similarity = cosines(query, tree["pool.key"])
        if self.specific:
            # Eqs. 1 to 3: one task-specific prompt and N - 1 task-similar ones.
            own, others = similarity.split([self.specific, self.size - self.specific], 1)
            similar = self.specific + top_positions(others, self.chosen - 1)
            chosen = torch.cat([top_positions(own, 1), similar], 1)
        else:
            chosen = top_positions(similarity, self.chosen)
        return similarity.gather(1, chosen), chosen

    def _features(self, backbone: Backbone, tree: Tree, batch: Batch, chosen: Tensor) -> Tensor:
        # Input of the first block: [P_{s1}; ..; P_{sN}; P^c; x_e] with the embedded image x_e.
        prompts = gather_prompts(tree["pool.prompt"], chosen).flatten(1, 2)  # [B, N L_p, D]
        common = tree["common"].expand(len(prompts), -1, -1)
        return backbone(batch.x, {"tokens": torch.cat([prompts, common], 1)}, pool=self.pooled)
