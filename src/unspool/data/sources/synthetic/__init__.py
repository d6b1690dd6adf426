"""Source kind `synthetic`: generated tasks as documents of any length: facts, questions and answers.

The five tasks are those of the synthetic baseline in Untie the Knots. The paper only names them; their documents are
our design.
"""
