// Small systems of linear equations.
#pragma once

#include <vector>

namespace pass {

using Matrix = std::vector<std::vector<double>>;  // the right-hand side is the last column

// Solve a regular system by Gaussian elimination with pivoting.
std::vector<double> solve(Matrix rows);

}  // namespace pass
