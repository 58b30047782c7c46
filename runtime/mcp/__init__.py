"""Tools of other programs by the Model Context Protocol: who offers them, how they are asked, the rounds of an answer that calls some."""
