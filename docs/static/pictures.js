// A picture has the width of its page, and on a click the size in which it was drawn.
addEventListener('click', ({target}) => target.matches?.('div.cell_output img') && target.classList.toggle('large'));
