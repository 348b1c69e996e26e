"""The services `~/list_drafts` and `~/pin_draft`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.node import Node

from memspec_core.errors import MemSpecError
from memspec_core.models.places import brought_along
from memspec_core.settings import DEFAULT, DraftSource
from memspec_core.snapshot import DraftSnapshot, DraftState
from memspec_msgs.srv import ListDrafts, PinDraft
from memspec_ros.conversions import draft_message

if TYPE_CHECKING:
    from memspec_core.runtime import Runtime


class DraftServices:
    """Answers for the runtime that `runtime` gives; without one, for the `named` drafts."""

    def __init__(
        self,
        node: Node,
        runtime: Callable[[], "Runtime | None"],
        named: Callable[[], Sequence[DraftSource]],
    ) -> None:
        self._logger = node.get_logger()
        self._runtime = runtime
        self._named = named
        # A pin waits for the worker, which may wait for a disc; a list must not wait for either.
        for kind, name, answer in (
            (ListDrafts, "~/list_drafts", self._list),
            (PinDraft, "~/pin_draft", self._pin),
        ):
            group = MutuallyExclusiveCallbackGroup()
            node.create_service(kind, name, answer, callback_group=group)

    def _list(
        self, _request: ListDrafts.Request, response: ListDrafts.Response
    ) -> ListDrafts.Response:
        runtime = self._runtime()
        if runtime is not None:
            drafts = runtime.snapshot().drafts
        else:
            drafts = tuple(_stored(draft) for draft in self._named())
        response.drafts = [draft_message(draft) for draft in drafts]
        return response

    def _pin(self, request: PinDraft.Request, response: PinDraft.Response) -> PinDraft.Response:
        runtime = self._runtime()
        if runtime is None:
            response.message = "The node is not configured, so there is no draft to pin."
            return response
        try:
            runtime.pin(request.draft, request.pin)
        except MemSpecError as error:
            response.message = str(error)
            self._logger.warning(f"Refused to change a pin: {error}")
            return response
        response.success = True
        done = "stays resident" if request.pin else "is left to the strategy"
        response.message = f"The draft '{request.draft}' {done}."
        return response


def _stored(draft: DraftSource) -> DraftSnapshot:
    """Return what is known of a draft before configure: where it lies."""
    folder = brought_along(draft.name) if draft.path == DEFAULT else Path(draft.path).expanduser()
    path = draft.path if folder is None else str(folder)
    return DraftSnapshot(draft.name, path, "", DraftState.STORED)
