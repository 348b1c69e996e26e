#!/usr/bin/env python3
"""A conversation in a terminal: keeps the list of messages, streams each answer.

    ros2 run memspec_ros chat.py --system "You are a helpful robot."

The list has the form that OpenAI's interface knows: [{"role": "user", "content": "..."}, ...].
Ctrl-C cancels an answer, Ctrl-D ends.
"""

import argparse
import signal
import sys
import threading

import rclpy

from memspec_msgs.action import Generate
from memspec_msgs.msg import ChatMessage
from memspec_ros.arguments import parsed, start_ros
from memspec_ros.client import ClientError, NodeClient


class Chat:
    """The messages so far, the system's first, and a client to send them with."""

    def __init__(self, client, system=""):
        self._client = client
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, content, write):
        """Return the answer; `write` has had all of it by then. A failed turn is taken back."""
        self.messages.append({"role": "user", "content": content})
        try:
            goal = Generate.Goal(messages=[ChatMessage(**message) for message in self.messages])
            outcome = self._client.generate(goal, write)
            if outcome.aborted:
                raise ClientError(outcome.result.error)
        except ClientError:
            self.messages.pop()
            raise
        # Also what there is of a cancelled answer: the user has read it.
        self.messages.append({"role": "assistant", "content": outcome.result.text})
        return outcome.result.text


def main():
    """Converse until the end of the input."""
    parser = argparse.ArgumentParser(description="Converse with the node memspec.")
    parser.add_argument("--node", default="/memspec", help="with its namespace (%(default)s)")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds to wait for the node")
    options, given = parsed(parser, None)
    cancelled = threading.Event()
    start_ros("chat", given)
    try:
        client = NodeClient(f"/{options.node.strip('/')}", cancelled)
        client.wait_for_action(options.wait)
        signal.signal(signal.SIGINT, lambda *_: cancelled.set())
        converse(Chat(client, options.system), cancelled)
        client.close()
    except ClientError as error:
        return f"chat: {error}"
    finally:
        rclpy.try_shutdown()
    return 0


def converse(chat, cancelled):
    """Answer each line of the standard input."""
    print("> ", end="", flush=True)
    for line in sys.stdin:
        cancelled.clear()
        if line.strip():
            try:
                chat.ask(line.strip(), lambda text: print(text, end="", flush=True))
            except ClientError as error:
                print(f"chat: {error}", file=sys.stderr)
        print("\n> ", end="", flush=True)
    print()


if __name__ == "__main__":
    sys.exit(main())
