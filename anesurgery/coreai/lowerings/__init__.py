"""How each op of MIL is written in Core AI: each file, a family of ops, fills `coreai.table.TABLE`."""
