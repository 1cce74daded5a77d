function NAME(query, index) {
  const words = []
  for (let start = 0, end; start < query.length; start = end) {
    end = query.length
    while (end > start + 1 && !(query.slice(start, end) in index)) end--
    words.push(query.slice(start, end))
  }
  const known = words.filter(word => word.length > 1)
  return new Set(known.length ? known : words.some(word => word in index) ? words : [query])
}
