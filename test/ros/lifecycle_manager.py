"""A stand-in for Nav2's lifecycle manager with bond_timeout 0: the calls that it makes, in order.

After each transition it asks for the state at once, and gives up if that is not the one it expects.
"""

from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import GetState

REACHED = {
    Transition.TRANSITION_CONFIGURE: State.PRIMARY_STATE_INACTIVE,
    Transition.TRANSITION_ACTIVATE: State.PRIMARY_STATE_ACTIVE,
    Transition.TRANSITION_DEACTIVATE: State.PRIMARY_STATE_INACTIVE,
    Transition.TRANSITION_CLEANUP: State.PRIMARY_STATE_UNCONFIGURED,
    Transition.TRANSITION_UNCONFIGURED_SHUTDOWN: State.PRIMARY_STATE_FINALIZED,
}


class LifecycleManager:
    """Manages the nodes of some graphs; each command says whether all nodes followed it."""

    def __init__(self, *graphs):
        self._graphs = graphs

    def startup(self):
        return self._all(Transition.TRANSITION_CONFIGURE) and self.resume()

    def pause(self):
        return self._all(Transition.TRANSITION_DEACTIVATE)

    def resume(self):
        return self._all(Transition.TRANSITION_ACTIVATE)

    def reset(self):
        return self.pause() and self._all(Transition.TRANSITION_CLEANUP)

    def shutdown(self):
        return self.reset() and self._all(Transition.TRANSITION_UNCONFIGURED_SHUTDOWN)

    def _all(self, transition):
        return all(self._change(graph, transition) for graph in self._graphs)

    def _change(self, graph, transition):
        if not graph.transit(transition):
            return False
        answer = graph.call(GetState, "get_state", GetState.Request())
        return answer.current_state.id == REACHED[transition]
