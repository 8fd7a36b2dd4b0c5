"""Flight recorder, wait accounting, facts about steps."""
