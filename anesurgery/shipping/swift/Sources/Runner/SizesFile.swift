import Foundation

/// What `sizes.json` says of a model at several sizes: which function runs which inputs, and how to pad and crop.
public struct SizesFile: Decodable {
    public struct Size: Decodable {
        public let name: String
        /// The function of the package; nil for its only one.
        public let function: String?
        public let package: String
        public let inputs: [String: [Int]]
    }

    public struct Padding: Decodable {
        /// Input -> its axis that is filled up at the end.
        public let inputs: [String: Int]
        /// Output -> its axis that is cropped.
        public let outputs: [String: Int]
        /// Why inputs may not be filled up, or "".
        public let whyNot: String
        /// Input -> the number that it is filled up with.
        public let fill: [String: Double]
        /// Mask -> must the first place of each row count (or any)?
        public let hiding: [String: Bool]
        /// Output -> how many places of the inputs one of its own stands for.
        public let shares: [String: Int]
        /// Only lengths that are multiples of it are filled up, to sizes that are.
        public let multiple: Int
        /// The same for each further length, where sizes differ by several; they are filled up in this order.
        public let more: [Padding]
        /// Which lengths may not be filled up, and why, or "".
        public let others: String

        /// What is filled up along each length; none where nothing may be.
        public var each: [Padding] { whyNot.isEmpty ? [self] + more : [] }

        enum CodingKeys: String, CodingKey {
            case inputs, outputs, fill, hiding, shares, multiple, more, others
            case whyNot = "why_not"
        }
    }

    public let format: String
    public let version: Int
    /// In rising order.
    public let sizes: [Size]
    public let padding: Padding

    /// Read the `sizes.json` of a folder.
    public static func read(_ folder: URL) throws -> SizesFile {
        let data = try Data(contentsOf: folder.appendingPathComponent("sizes.json"))
        let file = try JSONDecoder().decode(SizesFile.self, from: data)
        guard file.format == "anesurgery sizes", file.version == 4 else {
            throw SizesError.version(file.version)
        }
        return file
    }

    /// The size for inputs of these shapes, and for each of `padding.each` their length, to which outputs are
    /// cropped (by their number in `shares`); none where they are whole.
    public func choose(_ shapes: [String: [Int]]) throws -> (size: Size, lengths: [Int]) {
        for size in sizes where size.inputs.filter({ shapes[$0.key] != $0.value }).isEmpty {
            return (size, [])
        }
        guard padding.whyNot.isEmpty else { throw SizesError.notPadded(padding.whyNot) }
        for size in sizes {
            if let lengths = shorter(size, shapes) { return (size, lengths) }
        }
        throw SizesError.noSize
    }

    /// Numbers in row-major order, filled up along one axis.
    public func filled<Number>(
        _ values: [Number], shape: [Int], axis: Int, to length: Int, with fill: Number
    ) -> [Number] {
        let row = shape[axis...].reduce(1, *)
        let more = (length - shape[axis]) * shape[(axis + 1)...].reduce(1, *)
        var whole: [Number] = []
        for start in 0..<shape[..<axis].reduce(1, *) {
            whole.append(contentsOf: values[(start * row)..<((start + 1) * row)])
            whole.append(contentsOf: [Number](repeating: fill, count: more))
        }
        return whole
    }

    /// The first slices along one axis, of numbers in row-major order.
    public func cropped<Number>(_ values: [Number], shape: [Int], axis: Int, to length: Int) -> [Number] {
        let row = shape[axis...].reduce(1, *)
        let kept = length * shape[(axis + 1)...].reduce(1, *)
        var part: [Number] = []
        for start in 0..<shape[..<axis].reduce(1, *) {
            part.append(contentsOf: values[(start * row)..<(start * row + kept)])
        }
        return part
    }

    /// See that each row of a mask leaves something to be seen, before it is filled up along one of `padding.each`.
    public func check(_ mask: String, _ values: [Double], shape: [Int], along padding: Padding) throws {
        guard let first = padding.hiding[mask], let axis = padding.inputs[mask] else { return }
        let fill = padding.fill[mask] ?? 0
        let inner = shape[(axis + 1)...].reduce(1, *)
        for start in 0..<shape[..<axis].reduce(1, *) {
            for column in 0..<inner {
                let places = (0..<shape[axis]).map { values[(start * shape[axis] + $0) * inner + column] }
                let seen = places.map { fill < 0 ? $0 > fill / 2 : $0 != fill }
                guard first ? seen[0] : seen.contains(true) else { throw SizesError.hidesAll(mask) }
            }
        }
    }

    /// The lengths of the inputs to fill up, if that makes them as long as those of a size.
    private func shorter(_ size: Size, _ shapes: [String: [Int]]) -> [Int]? {
        var filled = shapes
        var lengths: [Int] = []
        for one in padding.each {
            var length: Int?
            for (name, axis) in one.inputs {
                guard let whole = size.inputs[name], let shape = filled[name], shape.count == whole.count else {
                    return nil
                }
                if shape[axis] < 1 || shape[axis] > whole[axis] { return nil }
                if let other = length, other != shape[axis] { return nil }
                let even = shape[axis] % one.multiple == 0 && whole[axis] % one.multiple == 0
                if shape[axis] != whole[axis] && !even { return nil }
                length = shape[axis]
                filled[name]?[axis] = whole[axis]
            }
            guard let found = length else { return nil }
            lengths.append(found)
        }
        return size.inputs.filter({ filled[$0.key] != $0.value }).isEmpty ? lengths : nil
    }
}

public enum SizesError: Error {
    case version(Int)
    case notPadded(String)
    case noSize
    case hidesAll(String)
}
