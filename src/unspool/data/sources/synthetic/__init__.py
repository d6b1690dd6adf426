"""Source kind `synthetic`: generated tasks as documents: facts, questions and answers, at any length.

The five tasks are those of Untie the Knots' synthetic rival. The paper only names them; what a document of each looks
like is our design.
"""
