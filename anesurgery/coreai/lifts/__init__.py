"""What each op of Core AI is in MIL: each file, a family of ops, fills `lifts.table.TABLE`."""
