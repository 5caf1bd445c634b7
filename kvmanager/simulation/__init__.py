"""The real core in virtual time: nodes, links and engines that take the time that committed rates say."""
