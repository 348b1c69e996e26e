"""The services `~/list_drafts` and `~/pin_draft`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.node import Node

from memspec_core.errors import MemSpecError
from memspec_msgs.srv import ListDrafts, PinDraft
from memspec_ros.conversions import draft_message

if TYPE_CHECKING:
    from memspec_core.runtime import Runtime


class DraftServices:
    """Answers for the runtime that `runtime` gives; without one, that there is none."""

    def __init__(self, node: Node, runtime: Callable[[], "Runtime | None"]) -> None:
        self._logger = node.get_logger()
        self._runtime = runtime
        group = MutuallyExclusiveCallbackGroup()
        node.create_service(ListDrafts, "~/list_drafts", self._list, callback_group=group)
        node.create_service(PinDraft, "~/pin_draft", self._pin, callback_group=group)

    def _list(
        self, _request: ListDrafts.Request, response: ListDrafts.Response
    ) -> ListDrafts.Response:
        runtime = self._runtime()
        if runtime is not None:
            response.drafts = [draft_message(draft) for draft in runtime.snapshot().drafts]
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
