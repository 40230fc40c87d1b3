"""A comparison of the methods of credit on two environments, and the page that is made of it."""
