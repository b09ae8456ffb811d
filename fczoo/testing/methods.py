"""The check of a method."""

from collections.abc import Callable

from fczoo.core.method import Method
from fczoo.testing import hostile_uploads as hostile
from fczoo.testing import memory_rules as memory
from fczoo.testing import method_rules as rules
from fczoo.testing import model_rules as models
from fczoo.testing import training_rules as training
from fczoo.testing.method_under_test import MethodUnderTest
from fczoo.testing.world import small_method

METHOD_RULES: tuple[Callable[[MethodUnderTest], None], ...] = (
    rules.is_a_value,
    rules.options_survive_json,
    rules.says_what_it_is,
    rules.says_where_to_tune,
    rules.values_for_data_sets_are_valid,
    rules.begins_from_an_empty_state,
    rules.every_upload_is_declared,
    rules.uploads_are_finite_and_signed,
    rules.uploads_are_counted_in_bytes,
    rules.a_new_task_leaves_the_old_state_alone,
    rules.uploads_are_left_alone,
    rules.private_state_is_not_broadcast,
    rules.clients_need_no_private_state,
    training.clients_leave_the_state_alone,
    training.frozen_rows_stay,
    training.the_backbone_stays_frozen,
    training.padding_changes_nothing,
    training.answers_are_logits_of_the_classes_seen,
    training.answers_do_not_depend_on_the_batch,
    training.features_are_rows_of_images,
    training.accuracy_covers_every_task_seen,
    training.labels_that_come_back_are_added_to,
    training.the_same_seed_gives_the_same_run,
    training.another_seed_gives_another_run,
    training.clients_together_equal_clients_one_by_one,
    training.so_they_do_in_single_precision,
    memory.memories_are_finite,
    memory.exemplars_are_the_clients_own,
    memory.a_task_ends_in_order,
    models.a_loaded_model_predicts_the_same,
    hostile.a_hostile_client_cannot_stop_the_server,
)
"""Each takes a ``MethodUnderTest`` and raises AssertionError where the method breaks the rule
that its docstring states.
"""


def check_method(method: str | Method) -> None:
    """Raise AssertionError, in one sentence, where a method breaks a rule.

    The method runs a few times in the toy world, one client at a time and with clients in one
    batched forward, in float64 and float32: some seconds for a head on frozen features, up to a
    minute for a method that trains prompts in six blocks.

    Every one of ``METHOD_RULES`` is checked; their docstrings have the details: the method is a
    frozen dataclass whose options are explained and survive JSON; server and clients change nothing
    that they receive; every tensor of an upload is declared, finite and counted; nothing private
    reaches a client; padding counts for nothing; answers are logits of the classes seen, and
    features rows of images, whatever the batch; a run is the same from the same seed and however many
    clients train together; its saved model predicts the same when it is loaded; and no hostile upload stops
    the server.

    Args:
        method: Registered name, whose whole-number options are made small (``small_method``), or an
            instance, which is used as it is.

    Raises:
        AssertionError: A rule is broken.
    """
    subject = MethodUnderTest(small_method(method) if isinstance(method, str) else method)
    for rule in METHOD_RULES:
        rule(subject)
