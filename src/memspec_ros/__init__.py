"""The ROS 2 face of the runtime: a managed node, its action, topics, services and clients.

Each module translates between messages and objects of `memspec_core`; no decision about drafts is
made here. Read `node.py` first.
"""
