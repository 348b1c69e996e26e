"""The command `memspec`: one file a subcommand."""
