import CoreML
import Foundation

/// A model without a cache: arrays in, arrays out.
public final class PlainModel {
    private let model: MLModel

    /// Compile and load a package, or one function of it.
    public convenience init(
        _ package: URL, function: String? = nil, units: MLComputeUnits = .cpuAndNeuralEngine
    ) async throws {
        try await self.init(compiled: MLModel.compileModel(at: package), function: function, units: units)
    }

    /// Load what is compiled already, or one function of it.
    init(compiled: URL, function: String?, units: MLComputeUnits) async throws {
        let configuration = MLModelConfiguration()
        configuration.computeUnits = units
        if let function { configuration.functionName = function }
        model = try await MLModel.load(contentsOf: compiled, configuration: configuration)
    }

    /// The outputs by name.
    public func predict(_ inputs: [String: Numbers]) async throws -> [String: Numbers] {
        let values = try inputs.mapValues { MLFeatureValue(multiArray: try $0.array()) }
        let outputs = try await model.prediction(from: MLDictionaryFeatureProvider(dictionary: values))
        var numbers: [String: Numbers] = [:]
        for name in outputs.featureNames {
            guard let array = outputs.featureValue(for: name)?.multiArrayValue else { continue }
            let scalars = MLShapedArray<Float>(converting: array).scalars
            let shape = array.shape.map { Int(truncating: $0) }
            numbers[name] = Numbers(shape: shape, dtype: "fp32", values: scalars.map { Double($0) })
        }
        return numbers
    }
}

/// An array as numbers in row-major order.
public struct Numbers: Decodable {
    public let shape: [Int]
    /// As `runner.json` calls it: fp16, fp32 or int32.
    public let dtype: String
    public let values: [Double]

    public init(shape: [Int], dtype: String, values: [Double]) {
        self.shape = shape
        self.dtype = dtype
        self.values = values
    }

    /// The same as an array of Core ML.
    func array() throws -> MLMultiArray {
        let types: [String: MLMultiArrayDataType] = ["fp16": .float16, "fp32": .float32, "int32": .int32]
        guard let type = types[dtype] else { throw RunnerError.missing(dtype) }
        let array = try MLMultiArray(shape: shape.map { NSNumber(value: $0) }, dataType: type)
        for (i, value) in values.enumerated() { array[i] = NSNumber(value: value) }
        return array
    }
}
