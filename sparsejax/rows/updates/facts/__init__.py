"""What a program does to rows: facts about its values, and about an optimizer's tables."""
